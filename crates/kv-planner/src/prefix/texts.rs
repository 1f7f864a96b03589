//! Owns the tokens of the pages in an index, side by side in one vector. It does not
//! own the nodes, whose slots number them.

use std::collections::HashMap;

/// Tokens of every node, as narrow as they allow: 32 bits each, but for pages with a
/// token that needs more.
#[derive(Debug)]
pub(super) struct Texts {
    page_size: usize,
    narrow: Vec<u32>,
    wide: HashMap<u32, Box<[i64]>>,
}

impl Texts {
    pub fn new(page_size: usize) -> Texts {
        Texts { page_size, narrow: Vec::new(), wide: HashMap::new() }
    }

    /// Writes the tokens of a slot: a page of them, or none for a root.
    pub fn set(&mut self, slot: u32, tokens: &[i64]) {
        self.wide.remove(&slot);
        let start = slot as usize * self.page_size;
        if self.narrow.len() < start + self.page_size {
            self.narrow.resize(start + self.page_size, 0);
        }
        if tokens.iter().fold(0, |bits, token| bits | token) >> 32 != 0 {
            self.wide.insert(slot, tokens.into());
            return;
        }
        let own = &mut self.narrow[start..start + tokens.len()];
        own.iter_mut().zip(tokens).for_each(|(own, token)| *own = *token as u32);
    }

    /// Whether a slot holds these tokens, a page of them.
    pub fn equal(&self, slot: u32, tokens: &[i64]) -> bool {
        if !self.wide.is_empty()
            && let Some(own) = self.wide.get(&slot)
        {
            return **own == *tokens;
        }
        let start = slot as usize * self.page_size;
        let own = &self.narrow[start..start + self.page_size];
        // Without branches, so that several tokens are compared at once.
        own.iter().zip(tokens).fold(0, |apart, (own, token)| apart | (i64::from(*own) ^ token)) == 0
    }

    pub fn append_to(&self, slot: u32, tokens: &mut Vec<i64>) {
        if let Some(own) = self.wide.get(&slot) {
            tokens.extend_from_slice(own);
            return;
        }
        let start = slot as usize * self.page_size;
        tokens.extend(self.narrow[start..start + self.page_size].iter().map(|token| i64::from(*token)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_written_again_holds_the_new_tokens_only() {
        let mut texts = Texts::new(2);
        let wide = i64::from(u32::MAX) + 1;
        for tokens in [[1, 2], [wide, 2], [0, 2], [3, i64::MAX]] {
            texts.set(3, &tokens);
            assert!(texts.equal(3, &tokens) && !texts.equal(3, &[tokens[0], tokens[1] - 1]));
            assert!(!texts.equal(3, &[tokens[0] ^ (1 << 40), tokens[1]]));
            let mut read = Vec::new();
            texts.append_to(3, &mut read);
            assert_eq!(read, tokens);
        }
    }
}
