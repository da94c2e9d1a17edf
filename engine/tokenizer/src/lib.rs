//! baton-tokenizer
