"""What tests build from: cases, toy models, stand-ins."""
