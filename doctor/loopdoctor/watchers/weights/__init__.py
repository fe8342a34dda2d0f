"""What becomes of weights between the steps."""
