"""One model: its state, its engine and successors, who waits for it and who has a place."""
