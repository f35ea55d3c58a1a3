"""What carries frames between two workers: each a few verbs, stated in base."""
