"""What is said of a model: codes, reasons, hints and the report."""
