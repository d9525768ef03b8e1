"""What is told about the supervisor and its engines: status, events, figures, logs."""
