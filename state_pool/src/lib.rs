//! Accounts for who holds which block and which slot.
