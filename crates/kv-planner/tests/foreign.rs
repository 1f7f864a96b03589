//! Manifests from a wire: whatever a peer sends is a value or a named error.

mod common;

use std::sync::Arc;

use common::world;
use kv_planner::*;
use proptest::prelude::*;

/// Positions of the numbers in a JSON text.
fn numbers(text: &str) -> Vec<(usize, usize)> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut index = 0;
    while index < bytes.len() {
        let start = index;
        while index < bytes.len() && bytes[index].is_ascii_digit() {
            index += 1;
        }
        if index > start && matches!(bytes[start - 1], b':' | b',' | b'[') {
            found.push((start, index));
        }
        index += 1;
    }
    found
}

fn plan_with(manifest: RankManifest, peer: &Arc<RankManifest>) {
    let manifest = Arc::new(manifest);
    let _ = Deployment::new(vec![manifest.clone()]);
    for (local, remote) in [(manifest.clone(), peer.clone()), (peer.clone(), manifest)] {
        let Ok(agreement) = agree(Side::Rank(local), Side::Rank(remote)) else { continue };
        let Ok(route) = agreement.route(0, 0) else { continue };
        let Ok(plan) = Plan::new(route, Runs::new(&[1, 2], &[2, 1]).unwrap()) else { continue };
        let limits = Capabilities { max_blocks: Some(10_000), ..Capabilities::default() };
        if let Ok(lowered) = lower(&plan, &limits) {
            assert_eq!(lowered.total_bytes, plan.nbytes());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn other_numbers(
        seed in any::<u64>(),
        tp in prop::sample::select(vec![1u64, 2, 4]),
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), prop::sample::select(vec![
                0, 1, 2, 3, 7, 8, 64, 1 << 31, 1 << 32, 1 << 40, i64::MAX as u64, u64::MAX - 1, u64::MAX,
            ])),
            0..4,
        ),
    ) {
        let world = world(seed, (1, tp), (1, 1), seed % 2 == 0);
        let mut text = world.agreement.local.manifests()[0].to_json();
        for (place, number) in changes {
            let places = numbers(&text);
            let (start, stop) = places[place.index(places.len())];
            text.replace_range(start..stop, &number.to_string());
        }
        if let Ok(manifest) = RankManifest::from_json(&text) {
            plan_with(manifest, &world.agreement.remote.manifests()[0]);
        }
    }

    #[test]
    fn other_bytes(seed in any::<u64>(), place in any::<prop::sample::Index>(), byte in 32u8..127, cut in any::<bool>()) {
        let world = world(seed, (1, 1), (1, 1), false);
        let mut text = world.agreement.local.manifests()[0].to_json().into_bytes();
        let index = place.index(text.len());
        if cut {
            text.truncate(index);
        } else {
            text[index] = byte;
        }
        if let Ok(manifest) = RankManifest::from_json(&String::from_utf8(text).unwrap()) {
            plan_with(manifest, &world.agreement.remote.manifests()[0]);
        }
    }
}
