//! One example of every kind of error, so that none is dead or undescribed.

mod common;

use std::sync::Arc;

use kv_planner::*;

fn spec(component: Component, layer_ids: &[u64], total_heads: u64) -> ComponentSpec {
    ComponentSpec {
        component,
        part: Part::Target,
        layer_ids: layer_ids.to_vec(),
        dtype: DType::Float16,
        total_heads,
        dims: 4,
        axes: [Axis::Token, Axis::Head, Axis::Dim],
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    }
}

fn unchecked(components: Vec<ComponentSpec>) -> ModelLayout {
    ModelLayout { components, page_size: 2, fingerprint: "m".into(), kernel_block_size: None, format_version: 1 }
}

fn layout(components: Vec<ComponentSpec>) -> Arc<ModelLayout> {
    Arc::new(unchecked(components).validated().unwrap())
}

fn entry(layer_id: u64, address: u64, head_range: (u64, u64)) -> BufferEntry {
    let item_bytes = 2 * (head_range.1 - head_range.0) * 4 * 2;
    BufferEntry {
        component: Component::Key,
        part: Part::Target,
        layer_id,
        device: "cpu".into(),
        address,
        nbytes: item_bytes * 4,
        item_stride: item_bytes,
        item_bytes,
        head_range,
        occurrence: 0,
    }
}

fn at(pp_rank: u64, pp_size: u64, tp_rank: u64, tp_size: u64) -> Placement {
    Placement { pp_rank, pp_size, tp_rank, tp_size, ..Placement::default() }
}

fn key_layout() -> Arc<ModelLayout> {
    layout(vec![spec(Component::Key, &[0, 1], 2)])
}

fn rank(placement: Placement, entries: Vec<BufferEntry>) -> Result<Arc<RankManifest>> {
    RankManifest::new(key_layout(), placement, entries).map(Arc::new)
}

fn whole() -> Arc<RankManifest> {
    rank(Placement::default(), vec![entry(0, 1000, (0, 2)), entry(1, 2000, (0, 2))]).unwrap()
}

fn plan() -> Plan {
    let agreement = agree(Side::Rank(whole()), Side::Rank(whole())).unwrap();
    Plan::new(agreement.route(0, 0).unwrap(), Runs::new(&[1, 3], &[1, 2]).unwrap()).unwrap()
}

fn deployment(manifests: Vec<Result<Arc<RankManifest>>>) -> Result<Deployment> {
    Deployment::new(manifests.into_iter().map(Result::unwrap).collect())
}

fn regions(buffers: &[(u64, u64)]) -> Result<Regions> {
    Regions::new(buffers, RegionLimits { alignment: 16, max_bytes: None, max_regions: Some(1) })
}

fn held() -> PrefixIndex {
    let index = PrefixIndex::new(2, 8, 8).unwrap();
    index.insert(&[1, 2, 3, 4], &[1, 2], &Namespace::default(), Tier::Device).unwrap();
    index
}

/// Equal calls give equal nodes.
fn nodes() -> Vec<NodeId> {
    held().find(&[1, 2, 3, 4], &Namespace::default(), None).unwrap().nodes
}

fn example(kind: ErrorKind) -> PlanError {
    let both = |tp_rank| rank(at(0, 1, tp_rank, 2), vec![entry(0, 1000, (0, 2)), entry(1, 2000, (0, 2))]);
    match kind {
        ErrorKind::ArgumentError => Component::parse("keys").unwrap_err(),
        ErrorKind::LayoutError => unchecked(vec![]).validated().unwrap_err(),
        ErrorKind::PlacementError => at(2, 2, 0, 1).validated().unwrap_err(),
        ErrorKind::ManifestError => rank(Placement::default(), vec![entry(7, 1000, (0, 2))]).unwrap_err(),
        ErrorKind::FormatError => ModelLayout::from_json("{}").unwrap_err(),
        ErrorKind::InconsistentDeployment => deployment(vec![Ok(whole()), Ok(whole())]).unwrap_err(),
        ErrorKind::IncompleteDeployment => deployment(vec![both(0), both(1)]).unwrap_err(),
        ErrorKind::LayoutMismatch => {
            let other = layout(vec![spec(Component::Key, &[0], 2)]);
            let other = RankManifest::new(other, Placement::default(), vec![]).unwrap();
            agree(Side::Rank(whole()), Side::Rank(Arc::new(other))).unwrap_err()
        }
        ErrorKind::UnsupportedPlacement => {
            let spread = rank(Placement { dcp_size: 2, ..Placement::default() }, vec![]).unwrap();
            agree(Side::Rank(spread), Side::Rank(whole())).unwrap_err()
        }
        ErrorKind::UnnamedPointers => name_pointers(&key_layout(), 1, None).unwrap_err(),
        ErrorKind::ContextMismatch => {
            let span = Span { page_size: 2, prefix_tokens: 0, page_offset: 0, tokens: 2 };
            let context = Context { rank: 0, size: 2 };
            let runs = page_interleaved(&[1], &[1], span, context, Slots::Local).unwrap();
            Plan::new(plan().route().clone(), runs).unwrap_err()
        }
        ErrorKind::RegionLimitExceeded => regions(&[(0, 1), (64, 1)]).unwrap_err(),
        ErrorKind::UnregisteredMemory => {
            let elsewhere = regions(&[(64, 1)]).unwrap();
            lower_within(&plan(), &Capabilities::default(), Some(&elsewhere), None).unwrap_err()
        }
        ErrorKind::HeadsDoNotSplit => split_heads(3, 0, 2).unwrap_err(),
        ErrorKind::UnequalPages => Runs::new(&[1], &[]).unwrap_err(),
        ErrorKind::ReservedPage => Runs::new(&[0], &[1]).unwrap_err(),
        ErrorKind::PageOutOfRange => Plan::new(plan().route().clone(), Runs::new(&[4], &[1]).unwrap()).unwrap_err(),
        ErrorKind::DuplicateDestination => Runs::new(&[1, 2], &[3, 3]).unwrap_err(),
        ErrorKind::ItemKindMismatch => {
            let rows = Runs::of_kind(&[1], &[1], ItemKind::RequestRow).unwrap();
            Plan::new(plan().route().clone(), rows).unwrap_err()
        }
        ErrorKind::SliceError => plan().slice(&Slice { layer_ids: Some(vec![9]), ..Slice::default() }).unwrap_err(),
        ErrorKind::BlockLimitExceeded => {
            lower(&plan(), &Capabilities { max_blocks: Some(3), ..Capabilities::default() }).unwrap_err()
        }
        ErrorKind::AddressOverflow => rank(Placement::default(), vec![entry(0, u64::MAX - 10, (0, 2))]).unwrap_err(),
        ErrorKind::RowLayoutError => RowLayout::new(vec![], 64).unwrap_err(),
        ErrorKind::LengthError => page_count(1, 0).unwrap_err(),
        ErrorKind::TokenOutOfRange => page_hashes(&[1, -1], 2, None, false).unwrap_err(),
        ErrorKind::PageAlreadyHeld => held().insert(&[9, 9], &[1], &Namespace::default(), Tier::Device).unwrap_err(),
        ErrorKind::StaleNode => held().path(NodeId(9)).unwrap_err(),
        ErrorKind::TierOrder => held().attach(&nodes()[1..], &[1], Tier::Host).unwrap_err(),
        ErrorKind::TierConflict => held().attach(&nodes(), &[3, 4], Tier::Device).unwrap_err(),
        ErrorKind::LockError => {
            let index = held();
            let lock = index.lock_nodes(&nodes()).unwrap();
            index.unlock(lock).unwrap();
            index.unlock(lock).unwrap_err()
        }
        ErrorKind::AccountingError => TierCounts::new(9, 3, 1, 1).unwrap_err(),
        ErrorKind::InternalError => guarded::<()>(|| panic!("a defect")).unwrap_err(),
    }
}

#[test]
fn every_kind_has_an_example_that_says_what_to_do() {
    for kind in ErrorKind::ALL {
        let error = example(*kind);
        assert_eq!(error.kind, *kind, "{error}");
        let detail = &error.detail;
        assert!(!detail.consequence.is_empty() && !detail.remedy.is_empty(), "{kind:?}");
        let text = error.to_string();
        assert!(text.contains(&detail.subject) && text.contains(&detail.remedy), "{text}");
        assert!(detail.local != Value::Absent && text.contains(&detail.local.to_string()), "{text}");
    }
}

#[test]
fn entries_break_one_invariant_at_a_time() {
    type Change = fn(&mut BufferEntry);
    let changes: [(&str, Change); 12] = [
        ("component", |e| e.component = Component::Value),
        ("layer_id", |e| e.layer_id = 2),
        ("occurrence", |e| e.occurrence = 1),
        ("head_range", |e| e.head_range = (0, 3)),
        ("head_range", |e| e.head_range = (2, 1)),
        ("item_bytes", |e| e.item_bytes = 16),
        ("item_stride", |e| e.item_stride = 31),
        ("nbytes", |e| e.nbytes = 127),
        ("nbytes", |e| e.nbytes = 129),
        ("nbytes", |e| e.nbytes = 31),
        ("address", |e| e.address = 0),
        ("device", |e| e.device = String::new()),
    ];
    for (field, change) in changes {
        let mut broken = entry(0, 1000, (0, 2));
        change(&mut broken);
        let error = rank(Placement::default(), vec![broken]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::ManifestError, "{field}: {error}");
        assert!(error.detail.subject.ends_with(field), "{field}: {error}");
    }
}

#[test]
fn names_and_bytes_are_held_once() {
    let twice = rank(Placement::default(), vec![entry(0, 1000, (0, 2)), entry(0, 2000, (0, 2))]).unwrap_err();
    assert!(twice.detail.subject.ends_with("name"), "{twice}");
    let shared = rank(Placement::default(), vec![entry(0, 1000, (0, 2)), entry(1, 1127, (0, 2))]).unwrap_err();
    assert!(shared.detail.subject.ends_with("address"), "{shared}");
    rank(Placement::default(), vec![entry(0, 1000, (0, 2)), entry(1, 1128, (0, 2))]).unwrap();
    let other = BufferEntry { device: "npu:0".into(), ..entry(1, 1000, (0, 2)) };
    rank(Placement::default(), vec![entry(0, 1000, (0, 2)), other]).unwrap();
}

#[test]
fn pages_of_two_layers_may_alternate() {
    let alternate =
        |layer: u64, address| BufferEntry { item_stride: 64, nbytes: 256 - 32, ..entry(layer, address, (0, 2)) };
    let manifest = rank(Placement::default(), vec![alternate(0, 1000), alternate(1, 1032)]).unwrap();
    assert_eq!(manifest.entries[1].items(), 4);
    assert!(rank(Placement::default(), vec![alternate(0, 1000), alternate(1, 1016)]).is_err());
}

#[test]
fn empty_buffers_are_no_pairs() {
    let empty = BufferEntry { head_range: (0, 0), item_bytes: 0, item_stride: 0, nbytes: 0, ..entry(0, 0, (0, 2)) };
    let idle = rank(at(0, 1, 0, 2), vec![BufferEntry { layer_id: 1, ..empty.clone() }, empty]).unwrap();
    let agreement = agree(Side::Rank(idle), Side::Rank(whole())).unwrap();
    let route = agreement.route(0, 0).unwrap();
    assert!(route.pairs().is_empty());
    let plan = Plan::new(route, Runs::new(&[1, 2], &[1, 2]).unwrap()).unwrap();
    let lowered = lower(&plan, &Capabilities { max_blocks: Some(0), ..Capabilities::default() }).unwrap();
    assert_eq!((plan.nbytes(), plan.block_count(), lowered.batches.len()), (0, 0, 0));
}

#[test]
fn layouts_break_one_invariant_at_a_time() {
    type Change = fn(&mut ModelLayout);
    let changes: [(&str, Change); 13] = [
        ("components", |l| l.components.clear()),
        ("components", |l| l.components.push(l.components[0].clone())),
        ("key/target.layer_ids", |l| l.components[0].layer_ids.clear()),
        ("key/target.total_heads", |l| l.components[0].total_heads = 0),
        ("key/target.dims", |l| l.components[0].dims = 0),
        ("key/target.axes", |l| l.components[0].axes = [Axis::Token, Axis::Token, Axis::Dim]),
        ("page_size", |l| l.page_size = 0),
        ("kernel_block_size", |l| l.kernel_block_size = Some(0)),
        ("kernel_block_size", |l| l.kernel_block_size = Some(3)),
        ("fingerprint", |l| l.fingerprint.clear()),
        ("format_version", |l| l.format_version = 0),
        ("draft layer_ids", |l| {
            l.components.push(ComponentSpec { part: Part::Draft, layer_ids: vec![1], ..l.components[0].clone() })
        }),
        ("draft layer_ids", |l| {
            l.components[0].layer_ids.push(u64::MAX);
            l.components.push(ComponentSpec { part: Part::Draft, ..l.components[0].clone() })
        }),
    ];
    for (subject, change) in changes {
        let mut broken = unchecked(vec![spec(Component::Key, &[0, 1], 2)]);
        change(&mut broken);
        let error = broken.validated().unwrap_err();
        assert_eq!((error.kind, error.detail.subject.as_str()), (ErrorKind::LayoutError, subject), "{error}");
    }
}

#[test]
fn deployments_say_what_is_missing_or_double() {
    let text = |manifests: Vec<Result<Arc<RankManifest>>>| {
        let error = deployment(manifests).unwrap_err();
        assert_eq!(error.kind, ErrorKind::IncompleteDeployment, "{error}");
        error.to_string()
    };
    let single = Placement::default();
    let missing_layer = text(vec![rank(single, vec![entry(0, 1000, (0, 2))])]);
    assert!(missing_layer.contains("key/target layer 1") && missing_layer.contains("no rank"), "{missing_layer}");
    let missing_head = text(vec![rank(single, vec![entry(0, 1000, (0, 1)), entry(1, 2000, (0, 2))])]);
    assert!(missing_head.contains("layer 0") && missing_head.contains("heads 1..2"), "{missing_head}");
    let first_head = text(vec![rank(single, vec![entry(0, 1000, (1, 2)), entry(1, 2000, (0, 2))])]);
    assert!(first_head.contains("heads 0..1"), "{first_head}");
    let two_stages = text(vec![
        rank(at(0, 2, 0, 1), vec![entry(0, 1000, (0, 2)), entry(1, 2000, (0, 2))]),
        rank(at(1, 2, 0, 1), vec![entry(1, 2000, (0, 2))]),
    ]);
    assert!(two_stages.contains("layer 1") && two_stages.contains("stages 0, 1"), "{two_stages}");
    let missing_rank = text(vec![rank(at(0, 2, 0, 1), vec![entry(0, 1000, (0, 2)), entry(1, 2000, (0, 2))])]);
    assert!(missing_rank.contains("1 against 2"), "{missing_rank}");
    let replicas = (0..4).map(|tp_rank| {
        let head = tp_rank / 2;
        rank(at(0, 1, tp_rank, 4), vec![entry(0, 1000, (head, head + 1)), entry(1, 2000, (head, head + 1))])
    });
    deployment(replicas.collect()).unwrap();
}

#[test]
fn data_parallel_groups_are_complete_each() {
    let group = |dp_rank, entries| rank(Placement { dp_rank, dp_size: 2, ..Placement::default() }, entries);
    let full = || vec![entry(0, 1000, (0, 2)), entry(1, 2000, (0, 2))];
    let sides = deployment(vec![group(0, full()), group(1, full())]).unwrap();
    let agreement = agree(Side::Deployment(Arc::new(sides)), Side::Rank(whole())).unwrap();
    assert_eq!(agreement.route(0, 0).unwrap().pairs().len(), 2);
    assert_eq!(agreement.route(1, 0).unwrap().pairs().len(), 2);
    assert!(deployment(vec![group(0, full()), group(1, vec![entry(0, 1000, (0, 2))])]).is_err());
}

#[test]
fn one_data_parallel_group_is_a_side_and_a_part_of_one_is_not() {
    let of = |dp_rank, pp_rank| {
        let place = Placement { dp_rank, dp_size: 3, ..at(pp_rank, 2, 0, 1) };
        rank(place, vec![entry(pp_rank, 1000, (0, 2))])
    };
    for dp_rank in 0..3 {
        let group = deployment(vec![of(dp_rank, 0), of(dp_rank, 1)]).unwrap();
        let agreement = agree(Side::Deployment(Arc::new(group)), Side::Rank(whole())).unwrap();
        assert_eq!([0, 1].map(|index| agreement.route(index, 0).unwrap().pairs().len()), [1, 1]);
    }
    deployment(vec![of(2, 1), of(0, 0), of(2, 0), of(0, 1)]).unwrap();
    for mixture in [vec![of(1, 0)], vec![of(0, 0), of(1, 1)], vec![of(0, 0), of(0, 1), of(2, 1)]] {
        let error = deployment(mixture).unwrap_err();
        assert_eq!(error.kind, ErrorKind::IncompleteDeployment);
        assert_eq!((&error.detail.local, &error.detail.remote), (&1u64.into(), &2u64.into()));
        assert!(error.detail.subject.starts_with("manifests of dp_rank "), "{error}");
    }
}

/// One head a rank: the two orders are the same bytes. Two heads: they are not.
#[test]
fn axis_orders_agree_only_where_their_bytes_do() {
    let side = |axes, tp_size| {
        let layout = layout(vec![ComponentSpec { axes, ..spec(Component::Key, &[0], 2) }]);
        let ranks = (0..tp_size).map(|tp_rank| {
            let entries = vec![entry(0, 1000, split_heads(2, tp_rank, tp_size).unwrap())];
            Arc::new(RankManifest::new(layout.clone(), at(0, 1, tp_rank, tp_size), entries).unwrap())
        });
        Side::Deployment(Arc::new(Deployment::new(ranks.collect()).unwrap()))
    };
    let (tokens, heads) = ([Axis::Token, Axis::Head, Axis::Dim], [Axis::Head, Axis::Token, Axis::Dim]);
    agree(side(tokens, 2), side(heads, 2)).unwrap();
    agree(side(tokens, 1), side(tokens, 2)).unwrap();
    for (local, remote) in [(1, 1), (1, 2), (2, 1)] {
        let error = agree(side(tokens, local), side(heads, remote)).unwrap_err();
        assert_eq!(error.detail.differences[0].field, "key/target.axes");
    }
}

#[test]
fn sizes_that_overflow_are_errors_and_not_wraps() {
    let wide = ComponentSpec { total_heads: 1 << 40, dims: 1 << 40, ..spec(Component::Key, &[0], 2) };
    assert_eq!(unchecked(vec![wide]).validated().unwrap_err().kind, ErrorKind::AddressOverflow);
    let (rows, width) = (1 << 40, 1 << 40);
    assert_eq!(
        RowField::new("a", DType::Int8, rows, width, Fill::Int(0)).unwrap_err().kind,
        ErrorKind::AddressOverflow
    );
    assert_eq!(select_index(&[], rows, width, 0).unwrap_err().kind, ErrorKind::AddressOverflow);
    assert_eq!(select_index(&[], 1 << 62, 1, 0).unwrap_err().kind, ErrorKind::LengthError);
}
