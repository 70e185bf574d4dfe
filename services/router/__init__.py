"""The router: who holds what, what a plan would cost, and which generation a pulling worker gets."""
