//! What only the inside can force: equal keys, and many threads.

use std::sync::Arc;
use std::thread;

use super::evict::EvictOptions;
use super::hash::Namespace;
use super::index::PrefixIndex;
use super::node::Tier;
use super::tree::Tree;

#[test]
fn equal_keys_are_told_apart_by_their_tokens() {
    let everyone = Namespace::default();
    let mut tree = Tree::new(1, 32, 0).unwrap().with_key(|_, _, _| 7);
    for first in 0..4i64 {
        let sequence = [first, 9, first];
        let pages: Vec<i64> = (1..4).map(|page| first * 3 + page).collect();
        tree.insert(&sequence, &pages, &everyone, Tier::Device).unwrap();
    }
    for first in [2i64, 0, 3, 1] {
        let found = tree.find(&[first, 9, first, 9], &everyone, None, 1).unwrap();
        assert_eq!(found.device_pages, (1..4).map(|page| first * 3 + page).collect::<Vec<i64>>());
    }
    let gone = tree.evict(Tier::Device, 6, EvictOptions::default());
    assert_eq!(gone.pages, [9, 8, 7, 3, 2, 1], "2 and 0 were used first, their leaves before their roots");
    assert_eq!(tree.find(&[2, 9, 2], &everyone, None, 1).unwrap().tokens(), 0);
    tree.insert(&[8, 7, 6, 5, 4, 2], &[1, 2, 3, 7, 8, 9], &everyone, Tier::Device).unwrap();
    assert_eq!(tree.find(&[8, 7, 6, 5, 4, 2], &everyone, None, 1).unwrap().device_pages, [1, 2, 3, 7, 8, 9]);
    assert_eq!(tree.find(&[3, 9, 3], &everyone, None, 1).unwrap().device_pages, [10, 11, 12]);
    assert_eq!(tree.find(&[1, 9, 1], &everyone, None, 1).unwrap().device_pages, [4, 5, 6]);
}

#[test]
fn threads_keep_the_counts() {
    const THREADS: i64 = 4;
    let index = Arc::new(PrefixIndex::new(2, 1 + 64 * THREADS as u64, 0).unwrap());
    let work = |thread: i64| {
        let index = Arc::clone(&index);
        move || {
            let mut free: Vec<i64> = (1..=64).map(|page| thread * 64 + page).collect();
            for round in 0..200i64 {
                let tokens = [1, 1, 2, 2, round % 7, thread, round % 3, 5];
                let pages = free.split_off(free.len() - 4);
                let done = index.insert(&tokens, &pages, &Namespace::default(), Tier::Device).unwrap();
                free.extend(&done.duplicate);
                let (found, lock) = index.find_locked(&tokens, &Namespace::default(), None).unwrap();
                let counts = index.counts().unwrap();
                assert!(counts.device.protected >= found.nodes.len() as u64);
                index.unlock(lock).unwrap();
                if free.len() < 8 {
                    free.extend(index.evict(Tier::Device, 16, EvictOptions::default()).pages);
                }
            }
            free.len() as u64
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|thread| thread::spawn(work(thread))).collect();
    let free: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    let counts = index.counts().unwrap();
    assert_eq!((counts.device.held + free, counts.locks), (64 * THREADS as u64, 0));
}

#[test]
fn a_locked_parent_is_no_promise() {
    let everyone = Namespace::default();
    let mut tree = Tree::new(1, 32, 8).unwrap();
    tree.insert(&[1, 2], &[1, 2], &everyone, Tier::Device).unwrap();
    let other = tree.insert(&[3], &[3], &everyone, Tier::Device).unwrap();
    let parent = tree.find(&[1], &everyone, None, 1).unwrap();
    tree.lock(&parent.nodes, 1).unwrap();
    tree.find(&[3], &everyone, None, 1).unwrap();
    let done = tree.evict(Tier::Device, 2, EvictOptions { keep_unbacked: true });
    assert_eq!((done.pages.len(), done.shortfall), (0, 2));
    assert_eq!(done.needs_backup.len(), 3, "both leaves, and the parent that one needs on the host");
    assert_eq!(done.needs_backup.last(), other.nodes.last());
}
