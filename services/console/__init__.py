"""The `roost` command: a supervisor that runs all services on one machine, and a terminal client."""
