"""Questions about nodes, signatures, subgraphs, and the removal of dead nodes."""
