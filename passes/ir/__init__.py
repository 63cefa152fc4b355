"""The graph: questions about nodes, operators that move elements, known signatures, and removing dead nodes."""
