"""The agent's control loop and its memory as tokens."""
