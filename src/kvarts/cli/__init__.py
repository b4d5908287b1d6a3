"""The command line: parses arguments, calls the library, prints results. Makes no decisions."""
