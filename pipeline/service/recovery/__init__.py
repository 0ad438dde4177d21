"""Recovery by replay: state built anew from the retained topics, and emissions sent again."""
