"""Examination of a machine and a configuration: what would stop or slow the daemon here."""
