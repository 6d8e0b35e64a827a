"""What adoption is worth: models that exist already, plain and with uncertainty, on the same items."""
