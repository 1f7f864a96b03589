//! Owns the hash chain of pages, which names a page's content and everything
//! before it the same way in every process. It does not own the index, which
//! compares tokens and needs no cryptographic hash.

use sha2::{Digest, Sha256};

use crate::error::{ErrorKind, PlanError, Result};

const NAMESPACE_TAG: &[u8] = b"sglang-cache-namespace-v1";
const WIDE_TAG: u8 = 0xff;

/// What separates equal tokens of unlike meaning: an extra key (an adapter, for
/// example) and a salt. An absent and an empty one are different.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Namespace {
    /// Adapter or other key of the request.
    pub extra_key: Option<String>,
    /// Salt that keeps tenants apart.
    pub cache_salt: Option<String>,
}

impl Namespace {
    /// Seed of the chain; `None` in the unnamed namespace, where both are absent.
    pub fn seed(&self) -> Option<[u8; 32]> {
        if self.extra_key.is_none() && self.cache_salt.is_none() {
            return None;
        }
        let mut state = Sha256::new_with_prefix(NAMESPACE_TAG);
        for part in [&self.extra_key, &self.cache_salt] {
            match part {
                None => state.update([0u8]),
                Some(text) => {
                    state.update([1u8]);
                    state.update((text.len() as u64).to_le_bytes());
                    state.update(text.as_bytes());
                }
            }
        }
        Some(state.finalize().into())
    }
}

/// Digests of the pages of a token sequence, each over its parent's digest and
/// its own tokens.
///
/// `prior` is the digest of the page before the first; `partial` hashes a last
/// page that is not full too. Tokens are little-endian 32-bit words; a page that
/// holds a wider one is 64-bit words after a tag byte.
pub fn page_hashes(tokens: &[i64], page_size: u64, prior: Option<[u8; 32]>, partial: bool) -> Result<Vec<[u8; 32]>> {
    let page_size = usable_page_size(page_size)?;
    let whole = tokens.len() / page_size * page_size;
    let hashed = if partial { tokens } else { &tokens[..whole] };
    let mut parent = prior;
    let mut text = vec![0u8; 32 + page_size.min(hashed.len()) * 4];
    let digest_page = |(position, page): (usize, &[i64])| {
        let mut state = Sha256::new();
        let bits = page.iter().fold(0, |bits, token| bits | token);
        if bits < 0 {
            check_tokens(&hashed[..position * page_size + page.len()])?;
        }
        if bits >> 32 == 0 {
            // Parent and page as one piece of text, which the digest takes without a copy.
            let (above, words) = text[..32 + page.len() * 4].split_at_mut(32);
            let each = words.chunks_exact_mut(4).zip(page);
            each.for_each(|(word, token)| word.copy_from_slice(&(*token as u32).to_le_bytes()));
            above.copy_from_slice(&parent.unwrap_or_default());
            state.update(&text[if parent.is_some() { 0 } else { 32 }..32 + page.len() * 4]);
        } else {
            state.update(parent.as_ref().map_or(&[][..], |parent| parent));
            state.update([WIDE_TAG]);
            page.iter().for_each(|token| state.update(token.to_le_bytes()));
        }
        let digest: [u8; 32] = state.finalize().into();
        parent = Some(digest);
        Ok(digest)
    };
    hashed.chunks(page_size).enumerate().map(digest_page).collect()
}

/// A page size of 1 or more, as an index.
pub(super) fn usable_page_size(page_size: u64) -> Result<usize> {
    usize::try_from(page_size).ok().filter(|size| (1..=1 << 24).contains(size)).ok_or_else(|| {
        PlanError::new(
            ErrorKind::LengthError,
            "page_size",
            page_size,
            "1..=2**24",
            "tokens would not fall into pages",
            "give the page size of the pool",
        )
    })
}

/// Refuses negative ids: placeholders of drafts never name content.
pub(super) fn check_tokens(tokens: &[i64]) -> Result<()> {
    if tokens.iter().fold(0, |all, token| all | token) >= 0 {
        return Ok(());
    }
    match tokens.iter().position(|token| *token < 0) {
        None => Ok(()),
        Some(position) => Err(PlanError::new(
            ErrorKind::TokenOutOfRange,
            format!("tokens[{position}]"),
            tokens[position],
            0u64,
            "a placeholder has no content that another request could share",
            "give only tokens that were computed, each 0 or more",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digest: &[u8; 32]) -> String {
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_page_of_one_token_is_the_digest_of_its_word() {
        // sha256 of the bytes 01 00 00 00, computed with coreutils.
        let digests = page_hashes(&[1], 1, None, false).unwrap();
        assert_eq!(hex(&digests[0]), "67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450");
    }

    #[test]
    fn whole_pages_only_unless_asked() {
        let tokens: Vec<i64> = (0..10).collect();
        assert_eq!(page_hashes(&tokens, 4, None, false).unwrap().len(), 2);
        let three = page_hashes(&tokens, 4, None, true).unwrap();
        assert_eq!(three.len(), 3);
        assert_eq!(page_hashes(&tokens[4..], 4, Some(three[0]), true).unwrap(), three[1..]);
        assert!(page_hashes(&[], 4, None, true).unwrap().is_empty());
    }

    #[test]
    fn absent_and_empty_namespaces_differ() {
        let space = |extra: Option<&str>, salt: Option<&str>| {
            Namespace { extra_key: extra.map(str::to_owned), cache_salt: salt.map(str::to_owned) }.seed()
        };
        let seeds = [
            space(None, None),
            space(Some(""), None),
            space(None, Some("")),
            space(Some("a"), Some("b")),
            space(Some("ab"), None),
            space(Some("ab"), Some("")),
        ];
        for (position, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..position].contains(seed));
        }
    }

    #[test]
    fn refusals_are_named() {
        assert_eq!(page_hashes(&[1], 0, None, false).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(page_hashes(&[3, -1], 2, None, false).unwrap_err().kind, ErrorKind::TokenOutOfRange);
    }
}
