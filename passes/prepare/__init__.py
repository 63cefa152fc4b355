"""Changes in front of the matcher. The ordinary matcher can match what they make; otherwise they are undone."""
