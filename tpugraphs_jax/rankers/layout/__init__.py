"""Networks that score whole layout graphs."""
