"""Which module moves where: the coordinator's control loop, pure, so that the simulator runs it as it is."""
