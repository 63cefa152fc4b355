"""What single operators do to shapes."""
