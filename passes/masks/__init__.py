"""What happens to the scores besides their scale: terms become masks, biases, bands and packed sequences."""
