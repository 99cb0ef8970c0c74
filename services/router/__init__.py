"""Places each request on a prefill and a decode instance."""
