"""What prefill and decode share: one pure core and one shell."""
