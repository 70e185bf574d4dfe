"""The wire contract: every message, subject, frame and error that crosses a process boundary. Imports nothing of ours."""
