//! Laws of the prefix index: after any sequence of calls it is what a plain map
//! of prefixes says, in every count, page and order.
//!
//! Long because the map says again what every call of the index means.

use std::collections::{BTreeMap, BTreeSet};

use kv_planner::*;
use proptest::prelude::*;

const PAGE: usize = 2;
const POOL: [u64; 2] = [9, 7];

#[derive(Debug, Clone)]
enum Step {
    Insert { space: usize, tokens: Vec<i64>, tier: usize },
    Find { space: usize, tokens: Vec<i64>, limit: Option<u64>, lock: bool },
    Unlock(usize),
    Evict { tier: usize, wanted: u64, keep: bool },
    Drop { which: Vec<usize> },
    Backup { limit: u64, min_uses: u64 },
    Load { space: usize, tokens: Vec<i64>, given_up: bool },
    Unload { which: Vec<usize> },
}

fn tokens() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(prop_oneof![4 => 0i64..2, 1 => Just(1i64 << 33)], 0..10)
}

fn step() -> impl Strategy<Value = Step> {
    let space = 0usize..3;
    prop_oneof![
        4 => (space.clone(), tokens(), 0usize..2).prop_map(|(space, tokens, tier)| Step::Insert { space, tokens, tier }),
        3 => (space.clone(), tokens(), prop::option::of(0u64..10), any::<bool>())
            .prop_map(|(space, tokens, limit, lock)| Step::Find { space, tokens, limit, lock }),
        2 => (0usize..4).prop_map(Step::Unlock),
        2 => (0usize..2, 0u64..5, any::<bool>()).prop_map(|(tier, wanted, keep)| Step::Evict { tier, wanted, keep }),
        1 => prop::collection::vec(0usize..9, 0..3).prop_map(|which| Step::Drop { which }),
        2 => (0u64..4, 0u64..3).prop_map(|(limit, min_uses)| Step::Backup { limit, min_uses }),
        2 => (space, tokens(), any::<bool>())
            .prop_map(|(space, tokens, given_up)| Step::Load { space, tokens, given_up }),
        1 => prop::collection::vec(0usize..9, 0..4).prop_map(|which| Step::Unload { which }),
    ]
}

fn namespace(space: usize) -> Namespace {
    [
        Namespace::default(),
        Namespace { extra_key: Some(String::new()), cache_salt: None },
        Namespace { extra_key: None, cache_salt: Some("tenant".into()) },
    ][space]
        .clone()
}

type Key = (usize, Vec<i64>);

#[derive(Debug, Clone, Default)]
struct Entry {
    id: i64,
    pages: [Option<i64>; 2],
    last_used: u64,
    uses: u64,
}

/// The same as the index, as a map of whole prefixes; slow and plain.
struct World {
    index: PrefixIndex,
    entries: BTreeMap<Key, Entry>,
    free: [BTreeSet<i64>; 2],
    locks: Vec<(LockId, Vec<Key>)>,
    clock: u64,
    gone: Vec<NodeId>,
    /// Host pages that were dropped under locks, and those of the locks that are still held.
    lingering: BTreeMap<i64, Vec<LockId>>,
}

impl World {
    fn new() -> World {
        let free = POOL.map(|pages| (1..pages as i64).collect());
        let index = PrefixIndex::new(PAGE as u64, POOL[0], POOL[1]).unwrap();
        let (locks, lingering) = (Vec::new(), BTreeMap::new());
        World { index, entries: BTreeMap::new(), free, locks, clock: 0, gone: Vec::new(), lingering }
    }

    fn prefixes(space: usize, tokens: &[i64]) -> Vec<Key> {
        (1..=tokens.len() / PAGE).map(|pages| (space, tokens[..pages * PAGE].to_vec())).collect()
    }

    fn known(&self, space: usize, tokens: &[i64]) -> Vec<Key> {
        World::prefixes(space, tokens).into_iter().take_while(|key| self.entries.contains_key(key)).collect()
    }

    fn locked(&self, key: &Key) -> bool {
        self.locks.iter().any(|(_, keys)| keys.contains(key))
    }

    fn key_of(&self, id: i64) -> Key {
        self.entries.iter().find(|(_, entry)| entry.id == id).unwrap().0.clone()
    }

    fn parent(key: &Key) -> Option<Key> {
        (key.1.len() > PAGE).then(|| (key.0, key.1[..key.1.len() - PAGE].to_vec()))
    }

    /// The entry that leaves next: unlocked, no child in the tier, oldest, then deepest.
    fn next_leaf(&self, tier: usize) -> Option<Key> {
        let has_child = |key: &Key| {
            self.entries
                .iter()
                .any(|(other, entry)| World::parent(other).as_ref() == Some(key) && entry.pages[tier].is_some())
        };
        self.entries
            .iter()
            .filter(|(key, entry)| entry.pages[tier].is_some() && !has_child(key) && !self.locked(key))
            .min_by_key(|(key, entry)| (entry.last_used, usize::MAX - key.1.len()))
            .map(|(key, _)| key.clone())
    }

    fn take(&mut self, tier: usize, count: usize) -> Option<Vec<i64>> {
        let pages: Vec<i64> = self.free[tier].iter().copied().take(count).collect();
        (pages.len() == count).then(|| {
            pages.iter().for_each(|page| {
                self.free[tier].remove(page);
            });
            pages
        })
    }

    fn insert(&mut self, space: usize, tokens: &[i64], tier: Tier) {
        let (at, keys) = (tier as usize, World::prefixes(space, tokens));
        let Some(pages) = self.take(at, keys.len()) else { return };
        let done = self.index.insert(tokens, &pages, &namespace(space), tier).unwrap();
        self.clock += u64::from(!keys.is_empty());
        let (mut taken, mut duplicate) = (Vec::new(), Vec::new());
        for (position, (key, page)) in keys.iter().zip(&pages).enumerate() {
            let entry = self.entries.entry(key.clone()).or_default();
            (entry.id, entry.last_used, entry.uses) = (done.nodes[position].0, self.clock, entry.uses + 1);
            match entry.pages[at] {
                None => {
                    entry.pages[at] = Some(*page);
                    taken.push(position as i64);
                }
                Some(_) => duplicate.push(*page),
            }
            assert_eq!(Some(done.pages[position]), entry.pages[at]);
        }
        assert_eq!((&done.taken, &done.duplicate), (&taken, &duplicate));
        assert!(done.shared.is_empty());
        let again = self.index.insert(tokens, &done.pages, &namespace(space), tier).unwrap();
        assert_eq!((again.shared, again.taken.len(), again.duplicate.len()), (done.pages, 0, 0));
        self.clock += u64::from(!keys.is_empty());
        let clock = self.clock;
        keys.iter().for_each(|key| {
            let entry = self.entries.get_mut(key).unwrap();
            (entry.last_used, entry.uses) = (clock, entry.uses + 1);
        });
        self.free[at].extend(duplicate);
    }

    fn find(&mut self, space: usize, tokens: &[i64], limit: Option<u64>, lock: bool) -> PrefixMatch {
        let cut = limit.map_or(tokens.len(), |limit| tokens.len().min(limit as usize));
        let keys = self.known(space, &tokens[..cut]);
        let found = if lock {
            let (found, lock) = self.index.find_locked(tokens, &namespace(space), limit).unwrap();
            self.locks.push((lock, keys.clone()));
            found
        } else {
            self.index.find(tokens, &namespace(space), limit).unwrap()
        };
        self.clock += 1;
        assert_eq!(found.nodes.len(), keys.len());
        for (position, key) in keys.iter().enumerate() {
            let clock = self.clock;
            let entry = self.entries.get_mut(key).unwrap();
            entry.last_used = clock;
            assert_eq!(found.nodes[position].0, entry.id);
            let pages = [found.device_pages[position], found.host_pages[position]];
            assert_eq!(pages.map(|page| (page >= 0).then_some(page)), entry.pages);
            assert_eq!(self.index.path(found.nodes[position]).unwrap(), (key.1.clone(), namespace(space)));
        }
        let on_device = keys.iter().filter(|key| self.entries[key].pages[0].is_some()).count();
        assert_eq!(found.device_tokens(), (on_device * PAGE) as u64);
        found
    }

    fn evict(&mut self, tier: Tier, wanted: u64, keep: bool) -> Eviction {
        let at = tier as usize;
        let unbacked: Vec<i64> =
            self.entries.values().filter(|entry| entry.pages[1].is_none()).map(|entry| entry.id).collect();
        let evictable = self.evictable(at);
        let done = self.index.evict(tier, wanted, EvictOptions { keep_unbacked: keep });
        assert_eq!(done.pages.len() as u64 + done.shortfall, wanted);
        let left_behind: Vec<i64> = if tier == Tier::Host { self.left_behind(wanted) } else { Vec::new() };
        assert_eq!(&done.pages[..left_behind.len()], &left_behind[..], "they leave first");
        assert_eq!(done.pages.len(), left_behind.len() + done.removed.len() + done.kept.len());
        if keep && tier == Tier::Device {
            assert!(done.removed.is_empty(), "everything that left has a host copy");
            assert!(done.needs_backup.iter().all(|node| unbacked.contains(&node.0)));
            for (position, node) in done.needs_backup.iter().enumerate() {
                let parent = World::parent(&self.key_of(node.0)).map(|key| self.entries[&key].clone());
                let earlier = |id: i64| done.needs_backup[..position].contains(&NodeId(id));
                assert!(parent.is_none_or(|parent| parent.pages[1].is_some() || earlier(parent.id)));
            }
            assert_eq!(done.shortfall > 0, wanted > done.pages.len() as u64);
            assert!(done.shortfall == 0 || !done.needs_backup.is_empty() || done.pages.len() as u64 == evictable);
        } else {
            assert_eq!(done.pages.len() as u64, wanted.min(evictable), "all that is called evictable can be freed");
            assert!(done.needs_backup.is_empty());
        }
        for page in &done.pages[left_behind.len()..] {
            let key = if keep && tier == Tier::Device {
                self.entries.iter().find(|(_, entry)| entry.pages[0] == Some(*page)).unwrap().0.clone()
            } else {
                self.next_leaf(at).unwrap()
            };
            assert!(!self.locked(&key));
            let entry = self.entries.get_mut(&key).unwrap();
            assert_eq!(entry.pages[at].take(), Some(*page));
            let id = NodeId(entry.id);
            if entry.pages == [None, None] {
                assert!(done.removed.contains(&id));
                self.gone.push(id);
                self.entries.remove(&key);
            } else {
                assert!(done.kept.contains(&id));
            }
            assert!(self.free[at].insert(*page), "page {page} freed twice");
        }
        done
    }

    /// Takes out dropped pages that nothing locks any more, as many as are wanted.
    fn left_behind(&mut self, wanted: u64) -> Vec<i64> {
        let ended = self.lingering.iter().filter(|(_, locks)| locks.is_empty()).map(|(page, _)| *page);
        let pages: Vec<i64> = ended.take(wanted as usize).collect();
        for page in &pages {
            self.lingering.remove(page);
            assert!(self.free[1].insert(*page), "page {page} freed twice");
        }
        pages
    }

    /// The nodes and all below them lose their host page; one under a lock comes back later.
    fn drop_host(&mut self, which: &[usize]) {
        let all: Vec<Key> = self.entries.keys().cloned().collect();
        let chosen: Vec<Key> = which.iter().filter_map(|number| all.get(*number).cloned()).collect();
        let nodes: Vec<NodeId> = chosen.iter().map(|key| NodeId(self.entries[key].id)).collect();
        if let Some(gone) = self.gone.last() {
            let before = self.index.counts().unwrap();
            let stale = [&nodes[..], &[*gone]].concat();
            assert_eq!(self.index.drop_host(&stale).unwrap_err().kind, ErrorKind::StaleNode);
            assert_eq!(self.index.counts().unwrap(), before, "refused as a whole");
        }
        let below = |key: &Key| chosen.iter().any(|above| above.0 == key.0 && key.1[..].starts_with(&above.1[..]));
        let leaving: Vec<Key> =
            all.into_iter().filter(|key| below(key) && self.entries[key].pages[1].is_some()).collect();
        let done = self.index.drop_host(&nodes).unwrap();
        let mut free = BTreeSet::new();
        for key in &leaving {
            let locks: Vec<LockId> =
                self.locks.iter().filter(|(_, keys)| keys.contains(key)).map(|(lock, _)| *lock).collect();
            let entry = self.entries.get_mut(key).unwrap();
            let (id, page) = (NodeId(entry.id), entry.pages[1].take().unwrap());
            if entry.pages[0].is_some() {
                assert!(done.kept.contains(&id));
            } else {
                assert!(done.removed.contains(&id));
                self.gone.push(id);
                self.entries.remove(key);
                self.locks.iter_mut().for_each(|(_, keys)| keys.retain(|held| held != key));
            }
            if locks.is_empty() {
                free.insert(page);
            } else {
                self.lingering.insert(page, locks);
                assert!(!done.pages.contains(&page), "somebody may be reading it");
                let refused = self.index.insert(&[99, 99], &[page], &namespace(0), Tier::Host).unwrap_err();
                assert_eq!(refused.kind, ErrorKind::PageAlreadyHeld);
            }
        }
        assert_eq!(done.pages.iter().copied().collect::<BTreeSet<_>>(), free);
        assert_eq!((done.pages.len(), done.shortfall as usize), (free.len(), leaving.len() - free.len()));
        assert_eq!(done.removed.len() + done.kept.len(), leaving.len());
        self.free[1].extend(free);
    }

    /// Says whether the host had room.
    fn back_up(&mut self, nodes: &[NodeId]) -> bool {
        let Some(pages) = self.take(1, nodes.len()) else { return false };
        self.index.attach(nodes, &pages, Tier::Host).unwrap();
        for (node, page) in nodes.iter().zip(pages) {
            let key = self.key_of(node.0);
            self.entries.get_mut(&key).unwrap().pages[1] = Some(page);
        }
        true
    }

    fn evictable(&self, tier: usize) -> u64 {
        let ended = if tier == 1 { self.lingering.values().filter(|locks| locks.is_empty()).count() } else { 0 };
        let unlocked = self.entries.iter().filter(|(key, entry)| entry.pages[tier].is_some() && !self.locked(key));
        (unlocked.count() + ended) as u64
    }

    fn backup(&mut self, limit: u64, min_uses: u64) {
        let nodes = self.index.pending_backup(limit, min_uses, &[]);
        let eligible: Vec<i64> = self
            .entries
            .values()
            .filter(|entry| entry.pages[0].is_some() && entry.pages[1].is_none() && entry.uses >= min_uses)
            .map(|entry| entry.id)
            .collect();
        assert_eq!(nodes.len(), eligible.len().min(limit as usize));
        assert!(nodes.iter().all(|node| eligible.contains(&node.0)));
        if let [first, ..] = nodes[..] {
            assert!(!self.index.pending_backup(u64::MAX, 0, &[first]).contains(&first));
        }
        let backwards: Vec<NodeId> = nodes.iter().rev().copied().collect();
        let chained = nodes.iter().any(|node| {
            World::parent(&self.key_of(node.0)).is_some_and(|key| nodes.contains(&NodeId(self.entries[&key].id)))
        });
        if chained && let Some(pages) = self.take(1, nodes.len()) {
            let refused = self.index.attach(&backwards, &pages, Tier::Host).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::TierOrder);
            self.free[1].extend(pages);
        }
        self.back_up(&nodes);
    }

    /// Nodes lose their device pages, unless one below them that is not named has one.
    fn unload(&mut self, which: &[usize]) {
        let all: Vec<Key> = self.entries.keys().cloned().collect();
        let chosen: Vec<Key> = which.iter().filter_map(|number| all.get(*number).cloned()).collect();
        let nodes: Vec<NodeId> = chosen.iter().map(|key| NodeId(self.entries[key].id)).collect();
        let unlike: BTreeSet<&Key> = chosen.iter().collect();
        let bare = chosen.iter().any(|key| self.entries[key].pages[0].is_none()) || unlike.len() < chosen.len();
        let built_on = self.entries.iter().any(|(key, entry)| {
            let above = World::parent(key);
            entry.pages[0].is_some() && !chosen.contains(key) && above.is_some_and(|above| chosen.contains(&above))
        });
        let before = self.index.counts().unwrap();
        match self.index.unload(&nodes) {
            Ok(pages) => {
                assert!(!bare && !built_on);
                for (key, page) in chosen.iter().zip(pages) {
                    let entry = self.entries.get_mut(key).unwrap();
                    assert_eq!(entry.pages[0].take(), Some(page));
                    assert!(self.free[0].insert(page), "page {page} freed twice");
                    if entry.pages == [None, None] {
                        self.gone.push(NodeId(entry.id));
                        self.entries.remove(key);
                        self.locks.iter_mut().for_each(|(_, keys)| keys.retain(|held| held != key));
                    }
                }
            }
            Err(refused) => {
                assert_eq!(refused.kind, if bare { ErrorKind::TierConflict } else { ErrorKind::TierOrder });
                assert!(bare || built_on);
                assert_eq!(self.index.counts().unwrap(), before, "refused as a whole");
            }
        }
    }

    fn load(&mut self, space: usize, tokens: &[i64], given_up: bool) {
        let found = self.find(space, tokens, None, false);
        let lock = self.index.lock_match(&found).unwrap();
        let on_device = found.device_tokens() as usize / PAGE;
        let nodes = &found.nodes[on_device..];
        if let Some(pages) = self.take(0, nodes.len()) {
            self.index.attach(nodes, &pages, Tier::Device).unwrap();
            for (node, page) in nodes.iter().zip(pages) {
                let key = self.key_of(node.0);
                self.entries.get_mut(&key).unwrap().pages[0] = Some(page);
            }
            if given_up {
                let all: Vec<Key> = self.entries.keys().cloned().collect();
                let place = |node: &NodeId| all.iter().position(|key| *key == self.key_of(node.0)).unwrap();
                let which: Vec<usize> = nodes.iter().map(place).collect();
                self.unload(&which);
                nodes.iter().for_each(|node| assert_eq!(self.entries[&self.key_of(node.0)].pages[0], None));
            }
        }
        self.index.unlock(lock).unwrap();
        assert_eq!(self.index.unlock(lock).unwrap_err().kind, ErrorKind::LockError);
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Insert { space, tokens, tier } => self.insert(*space, tokens, Tier::ALL[*tier]),
            Step::Find { space, tokens, limit, lock } => {
                self.find(*space, tokens, *limit, *lock);
            }
            Step::Unlock(which) => {
                if !self.locks.is_empty() {
                    let (lock, _) = self.locks.remove(which % self.locks.len());
                    self.index.unlock(lock).unwrap();
                    self.lingering.values_mut().for_each(|locks| locks.retain(|held| *held != lock));
                }
            }
            Step::Drop { which } => self.drop_host(which),
            Step::Evict { tier: 0, wanted, keep: true } => {
                let wanted = (*wanted).min(self.evictable(0));
                let done = self.evict(Tier::Device, wanted, true);
                if self.back_up(&done.needs_backup) {
                    let rest = self.evict(Tier::Device, done.shortfall, true);
                    assert_eq!((rest.shortfall, rest.needs_backup.len()), (0, 0), "the backups named are enough");
                }
            }
            Step::Evict { tier, wanted, keep } => {
                self.evict(Tier::ALL[*tier], *wanted, *keep);
            }
            Step::Backup { limit, min_uses } => self.backup(*limit, *min_uses),
            Step::Load { space, tokens, given_up } => self.load(*space, tokens, *given_up),
            Step::Unload { which } => self.unload(which),
        }
    }

    fn check(&self) {
        let counts = self.index.counts().unwrap();
        for (at, tier) in [counts.device, counts.host].into_iter().enumerate() {
            let pages: Vec<i64> = self.entries.values().filter_map(|entry| entry.pages[at]).collect();
            assert_eq!(pages.len(), pages.iter().collect::<BTreeSet<_>>().len(), "a page is held by two nodes");
            let lingering = if at == 1 { self.lingering.len() } else { 0 };
            assert_eq!((tier.held, tier.evictable), ((pages.len() + lingering) as u64, self.evictable(at)));
            assert_eq!(tier.outside(), self.free[at].len() as u64, "available + evictable + protected = total");
            for (key, entry) in self.entries.iter().filter(|(_, entry)| entry.pages[at].is_some()) {
                let parent = World::parent(key).map(|key| &self.entries[&key]);
                assert!(parent.is_none_or(|parent| parent.pages[at].is_some()), "{entry:?} outlived its parent");
            }
        }
        for node in &self.gone {
            assert_eq!(self.index.path(*node).unwrap_err().kind, ErrorKind::StaleNode, "a name was given twice");
        }
        let spaces: BTreeSet<usize> = self.entries.keys().map(|key| key.0).collect();
        assert_eq!((counts.nodes, counts.locks), (self.entries.len() as u64, self.locks.len() as u64));
        assert_eq!(counts.namespaces, spaces.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_index_is_a_map_of_prefixes(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in &steps {
            world.run(step);
            world.check();
        }
        if !world.locks.is_empty() {
            prop_assert_eq!(world.index.clear().unwrap_err().kind, ErrorKind::LockError);
        }
        for (lock, _) in std::mem::take(&mut world.locks) {
            world.index.unlock(lock).unwrap();
        }
        let held = world.index.clear().unwrap();
        for (at, pages) in [held.0, held.1].into_iter().enumerate() {
            world.free[at].extend(pages);
            prop_assert_eq!(world.free[at].len() as u64, POOL[at] - 1);
        }
        world.entries.clear();
        world.lingering.clear();
        world.check();
    }

    /// What a match returns is what hashing its own path returns, page by page.
    #[test]
    fn matched_pages_rehash_to_the_asked_prefix(tokens in tokens(), more in tokens()) {
        let index = PrefixIndex::new(PAGE as u64, 64, 0).unwrap();
        let pages: Vec<i64> = (1..=(tokens.len() / PAGE) as i64).collect();
        index.insert(&tokens, &pages, &namespace(1), Tier::Device).unwrap();
        let asked = [&tokens[..tokens.len() / 2], &more].concat();
        let found = index.find(&asked, &namespace(1), None).unwrap();
        let expected = page_hashes(&asked, PAGE as u64, namespace(1).seed(), false).unwrap();
        for (position, node) in found.nodes.iter().enumerate() {
            let (path, space) = index.path(*node).unwrap();
            prop_assert_eq!(page_hashes(&path, PAGE as u64, space.seed(), false).unwrap(), &expected[..=position]);
        }
        prop_assert_eq!(index.find(&asked, &namespace(0), None).unwrap().tokens(), 0);
    }
}
