"""Commands that prove or measure: the only part of `deploy` that imports drills, simulation and bench, when called."""
