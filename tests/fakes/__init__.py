"""Stand-ins that speak the real contracts."""
