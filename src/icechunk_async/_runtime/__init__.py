"""What everything else runs on: bounded concurrency, the clock, telemetry, locks, back-off."""
