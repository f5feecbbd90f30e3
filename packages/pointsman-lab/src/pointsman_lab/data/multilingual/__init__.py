"""Text in several languages: pieces, sentences, packed blocks, masks, and tasks in the formats of XTREME."""
