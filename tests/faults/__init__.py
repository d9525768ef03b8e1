"""Kills, torn files, full disks."""
