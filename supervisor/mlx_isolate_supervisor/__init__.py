"""The supervisor: a reverse proxy on TCP that owns engine processes; never imports mlx."""
