"""The subcommands of `mlx-isolate`, one file each."""
