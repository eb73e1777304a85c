"""Pure decisions: whose segment is next, which exchange follows, when a step is committed. No MPI, JAX or clock."""
