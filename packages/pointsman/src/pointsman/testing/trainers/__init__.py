"""What a trainer does to a router: `check_trainer`, a verdict a line, each against float64 on tiny models."""
