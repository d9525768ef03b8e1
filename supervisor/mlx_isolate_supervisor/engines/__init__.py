"""Engine processes: spawned, watched, signalled and reaped; no policy of models."""
