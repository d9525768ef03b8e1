"""The daemon as a service of the user's: a systemd unit or a launchd agent."""
