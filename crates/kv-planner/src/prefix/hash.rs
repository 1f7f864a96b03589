//! Owns the hash chain of pages, which names a page's content and everything
//! before it the same way in every process. It does not own the index, which
//! compares tokens and needs no cryptographic hash.

use sha2::digest::consts::U64;
use sha2::digest::generic_array::GenericArray;
use sha2::{Digest, Sha256, compress256};

use crate::error::{ErrorKind, PlanError, Result};

const NAMESPACE_TAG: &[u8] = b"sglang-cache-namespace-v1";
const WIDE_TAG: u8 = 0xff;
/// Where sha256 starts (FIPS 180-4, 5.3.3).
const START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

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
    let mut text = Narrow::new(page_size.min(hashed.len()));
    let digest_page = |(position, page): (usize, &[i64])| {
        let bits = page.iter().fold(0, |bits, token| bits | token);
        if bits < 0 {
            check_tokens(&hashed[..position * page_size + page.len()])?;
        }
        let digest = match parent {
            Some(above) if bits >> 32 == 0 && page.len() == text.tokens => text.digest(above, page),
            _ => plain(parent, page, bits >> 32 == 0),
        };
        parent = Some(digest);
        Ok(digest)
    };
    hashed.chunks(page_size).enumerate().map(digest_page).collect()
}

/// The digest of any page.
fn plain(parent: Option<[u8; 32]>, page: &[i64], narrow: bool) -> [u8; 32] {
    let mut state = Sha256::new();
    state.update(parent.as_ref().map_or(&[][..], |parent| parent));
    if narrow {
        page.iter().for_each(|token| state.update((*token as u32).to_le_bytes()));
    } else {
        state.update([WIDE_TAG]);
        page.iter().for_each(|token| state.update(token.to_le_bytes()));
    }
    state.finalize().into()
}

type Block = GenericArray<u8, U64>;

/// Parent, tokens of 32 bits and padding as blocks of the hash, which takes them in one call. The
/// padding of pages of one length is the same and is written once.
struct Narrow {
    blocks: Vec<Block>,
    tokens: usize,
}

impl Narrow {
    fn new(tokens: usize) -> Narrow {
        let bytes = 32 + 4 * tokens;
        let mut blocks = vec![Block::default(); (bytes + 9).div_ceil(64)];
        blocks[bytes / 64][bytes % 64] = 0x80;
        if let Some(last) = blocks.last_mut() {
            last[56..].copy_from_slice(&(8 * bytes as u64).to_be_bytes());
        }
        Narrow { blocks, tokens }
    }

    fn digest(&mut self, parent: [u8; 32], page: &[i64]) -> [u8; 32] {
        let words = |text: &mut [u8], tokens: &[i64]| {
            let each = text.chunks_exact_mut(4).zip(tokens);
            each.for_each(|(word, token)| word.copy_from_slice(&(*token as u32).to_le_bytes()));
        };
        let (beside, behind) = page.split_at(page.len().min(8));
        self.blocks[0][..32].copy_from_slice(&parent);
        words(&mut self.blocks[0][32..], beside);
        self.blocks[1..].iter_mut().zip(behind.chunks(16)).for_each(|(block, tokens)| words(block, tokens));
        let mut state = START;
        compress256(&mut state, &self.blocks);
        let mut digest = [0; 32];
        digest.chunks_exact_mut(4).zip(state).for_each(|(word, own)| word.copy_from_slice(&own.to_be_bytes()));
        digest
    }
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
    fn blocks_written_at_once_have_the_digest_of_their_text() {
        for page_size in (1..80).chain([128, 1000]) {
            let tokens: Vec<i64> = (0..3 * page_size as i64).map(|token| token * 7 + (1 << 31)).collect();
            let mut parent = None;
            for (page, digest) in
                tokens.chunks(page_size).zip(page_hashes(&tokens, page_size as u64, None, false).unwrap())
            {
                assert_eq!(digest, plain(parent, page, true), "{page_size}");
                parent = Some(digest);
            }
        }
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
