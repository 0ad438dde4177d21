"""What the topics prove: the audit of a range, and the story of one task."""
