"""From command line, environment and file to the settings that the daemon runs with."""
