"""The ``lockstep`` command: one file per subcommand, each a thin layer over the library."""
