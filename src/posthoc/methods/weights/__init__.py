"""Methods that need the network itself, and what they share."""
