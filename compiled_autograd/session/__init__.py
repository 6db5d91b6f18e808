"""Who is enabled on which thread, with which compiler."""
