"""The KV stores of the mesh as a worker uses them: what they hold, what is fetched, what is put."""
