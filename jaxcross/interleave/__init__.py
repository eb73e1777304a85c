"""Pure decisions: whose segment is next, in what order jobs exchange, when a step is committed. No MPI, JAX, thread or clock."""
