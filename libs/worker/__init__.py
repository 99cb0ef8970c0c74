"""What the workers share, whichever role they have: settings, opening the model, sending tokens."""
