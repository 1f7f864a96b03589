//! The fuzz targets on a stable compiler: over inputs that once failed, and over a
//! seeded slice of random ones. `cargo fuzz` runs the same functions (fuzz/README.md).

#[path = "../fuzz/targets.rs"]
mod targets;

use std::path::Path;

use proptest::prelude::*;

fn regressions(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/regressions").join(target);
    let files = std::fs::read_dir(folder).unwrap();
    files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
}

type Target = fn(&[u8]) -> bool;

const TARGETS: [(&str, Target); 3] =
    [("manifests", targets::manifests), ("agree", targets::agree), ("lower", targets::lower)];

#[test]
fn what_once_failed_does_not() {
    for (name, target) in TARGETS {
        let inputs = regressions(name);
        assert!(!inputs.is_empty(), "{name} has no input");
        assert!(inputs.iter().filter(|input| target(input)).count() > 0, "no input of {name} comes to anything");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn bytes_are_an_answer_or_a_named_error(data in prop::collection::vec(any::<u8>(), 0..160)) {
        TARGETS.iter().for_each(|(_, target)| { target(&data); });
    }
}

/// Bytes that are mostly small make sides that mostly agree: enough of them come to
/// blocks, or the laws would hold of nothing.
#[test]
fn a_seeded_slice_comes_to_blocks() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut reached = [0; 3];
    for _ in 0..20_000 {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as u8
        };
        let data: Vec<u8> = (0..320).map(|_| if next() > 16 { next() % 190 } else { next() }).collect();
        reached.iter_mut().zip(TARGETS).for_each(|(count, (_, target))| *count += usize::from(target(&data)));
    }
    assert!(reached.iter().all(|count| *count > 20), "{reached:?} of 20,000 inputs came to something");
}
