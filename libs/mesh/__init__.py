"""The mesh as it is heard: the newest load and placement of each worker, and all migrations. Pure."""
