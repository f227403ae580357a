"""What methods of several families are made of; nothing here is a method."""
