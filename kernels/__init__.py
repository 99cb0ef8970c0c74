"""Device code: each folder has a torch reference, the fast ones, and the choice between them."""
