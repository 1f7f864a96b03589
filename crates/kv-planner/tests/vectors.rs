//! The golden vectors of `vectors/`, which the Python tests read too.

mod common;

use std::sync::Arc;

use kv_planner::*;
use serde_json::Value;

fn read(name: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is a list"))
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

fn expect_error<T: std::fmt::Debug>(case: &Value, result: &Result<T>) -> bool {
    let Some(expected) = case["error"].as_str() else { return false };
    let kind = result.as_ref().expect_err(expected).kind;
    assert_eq!(kind.name(), expected, "{case}");
    true
}

fn manifests(layout: &Arc<ModelLayout>, ranks: &Value) -> Arc<Deployment> {
    let rank = |rank: &Value| {
        let entry = |entry: &Value| {
            let number = |index: usize| entry[index].as_u64().unwrap();
            BufferEntry {
                component: Component::parse(entry[0].as_str().unwrap()).unwrap(),
                part: Part::parse(entry[1].as_str().unwrap()).unwrap(),
                layer_id: number(2),
                occurrence: number(3),
                device: "cpu".into(),
                address: number(4),
                nbytes: number(5),
                item_stride: number(6),
                item_bytes: number(7),
                head_range: (number(8), number(9)),
            }
        };
        let placement: Placement = serde_json::from_value(rank["placement"].clone()).unwrap();
        Arc::new(
            RankManifest::new(layout.clone(), placement, list(rank, "entries").iter().map(entry).collect()).unwrap(),
        )
    };
    Arc::new(Deployment::new(ranks.as_array().unwrap().iter().map(rank).collect()).unwrap())
}

fn layout(value: &Value) -> Arc<ModelLayout> {
    Arc::new(ModelLayout::from_json(&value.to_string()).unwrap())
}

#[test]
fn routes() {
    let file = read("routes.json");
    assert!(list(&file, "cases").len() > 15);
    for case in list(&file, "cases") {
        let name = &case["name"];
        let local = manifests(&layout(&case["layout"]), &case["source"]);
        let remote = manifests(&layout(&case["destination_layout"]), &case["destination"]);
        let parts: Vec<Part> =
            list(case, "parts").iter().map(|part| Part::parse(part.as_str().unwrap()).unwrap()).collect();
        let sizes = (local.manifests().len(), remote.manifests().len());
        let agreement = agree_on(Side::Deployment(local), Side::Deployment(remote), &parts).unwrap();
        let runs = Runs::new(&numbers(&case["source_pages"]), &numbers(&case["destination_pages"])).unwrap();
        let mut expected = list(case, "routes").iter().peekable();
        for source in 0..sizes.0 {
            for destination in 0..sizes.1 {
                let route = agreement.route(source, destination).unwrap();
                let here = |answer: &&Value| answer["source"] == source && answer["destination"] == destination;
                let Some(answer) = expected.next_if(here) else {
                    assert!(route.pairs().is_empty(), "{name}: {source} -> {destination}");
                    continue;
                };
                let mut pairs: Vec<_> = route
                    .pairs()
                    .iter()
                    .map(|pair| vec![pair.source_entry as i64, pair.destination_entry as i64])
                    .collect();
                pairs.sort_unstable();
                let right: Vec<_> = list(answer, "pairs").iter().map(numbers).collect();
                assert_eq!(pairs, right, "{name}: {source} -> {destination}");
                let plan = Plan::new(route, runs.clone()).unwrap();
                let mut blocks = Vec::new();
                for batch in lower(&plan, &Capabilities::default()).unwrap().batches {
                    for row in 0..batch.source.len() {
                        let block = [batch.source[row], batch.destination[row], batch.nbytes[row]];
                        blocks.push(block.map(|number| number as i64).to_vec());
                    }
                }
                blocks.sort_unstable();
                let right: Vec<_> = list(answer, "blocks").iter().map(numbers).collect();
                assert_eq!(blocks, right, "{name}: {source} -> {destination}");
                assert_eq!(plan.block_count(), right.len() as u64);
            }
        }
        assert!(expected.next().is_none(), "{name}: an expected route was not asked for");
    }
}

#[test]
fn runs() {
    for case in list(&read("runs.json"), "cases") {
        let result = Runs::new(&numbers(&case["source"]), &numbers(&case["destination"]));
        if !expect_error(case, &result) {
            let rows: Vec<_> = result
                .unwrap()
                .runs()
                .iter()
                .map(|run| [run.source, run.destination, run.count].map(|n| n as i64).to_vec())
                .collect();
            assert_eq!(rows, list(case, "runs").iter().map(numbers).collect::<Vec<_>>(), "{case}");
        }
    }
}

#[test]
fn heads() {
    for case in list(&read("heads.json"), "cases") {
        let (total, size) = (case["total"].as_u64().unwrap(), case["size"].as_u64().unwrap());
        let result: Result<Vec<_>> = (0..size).map(|rank| split_heads(total, rank, size)).collect();
        if !expect_error(case, &result) {
            let ranges: Vec<_> = result.unwrap().iter().map(|range| vec![range.0 as i64, range.1 as i64]).collect();
            assert_eq!(ranges, list(case, "ranges").iter().map(numbers).collect::<Vec<_>>(), "{case}");
        }
    }
}

#[test]
fn steps() {
    let file = read("steps.json");
    let number = |case: &Value, key: &str| case[key].as_u64().unwrap();
    for case in list(&file, "select_index") {
        let result =
            select_index(&numbers(&case["drafts"]), number(case, "rows"), number(case, "width"), number(case, "front"));
        if !expect_error(case, &result) {
            assert_eq!(result.unwrap(), numbers(&case["index"]), "{case}");
        }
    }
    for case in list(&file, "page_count") {
        let result = page_count(number(case, "tokens"), number(case, "page_size"));
        if !expect_error(case, &result) {
            assert_eq!(result.unwrap(), number(case, "pages"), "{case}");
        }
    }
    for case in list(&file, "kv_lengths") {
        let kind = SpeculativeKind::parse(case["kind"].as_str().unwrap()).unwrap();
        let result = kv_lengths(kind, &numbers(&case["prefix"]), number(case, "window"));
        if !expect_error(case, &result) {
            assert_eq!(result.unwrap(), numbers(&case["lengths"]), "{case}");
        }
    }
    for case in list(&file, "row_layout") {
        let field = |field: &Value| {
            let dtype = DType::parse(field[1].as_str().unwrap()).unwrap();
            let (rows, width) = (field[2].as_u64().unwrap(), field[3].as_u64().unwrap());
            RowField::new(field[0].as_str().unwrap(), dtype, rows, width, Fill::Int(0)).unwrap()
        };
        let layout =
            RowLayout::new(list(case, "fields").iter().map(field).collect(), number(case, "alignment")).unwrap();
        let offsets: Vec<i64> = layout.fields().iter().map(|field| field.offset.unwrap() as i64).collect();
        let sizes: Vec<i64> = layout.fields().iter().map(|field| field.nbytes as i64).collect();
        assert_eq!((offsets, sizes), (numbers(&case["offsets"]), numbers(&case["sizes"])), "{case}");
        assert_eq!(layout.nbytes(), number(case, "nbytes"));
    }
}

#[test]
fn offsets() {
    for case in list(&read("offsets.json"), "cases") {
        let number = |key: &str| case[key].as_u64().unwrap();
        let spec = ComponentSpec {
            component: Component::Latent,
            part: Part::Target,
            layer_ids: vec![0],
            dtype: DType::UInt8,
            total_heads: 1,
            dims: number("dims"),
            axes: [Axis::Token, Axis::Head, Axis::Dim],
            item_kind: ItemKind::Page,
            compression: 1,
            rows: 1,
            groups: vec![],
        };
        let layout = ModelLayout {
            components: vec![spec],
            page_size: number("page_size"),
            fingerprint: "m".into(),
            kernel_block_size: None,
            format_version: 1,
        };
        let layout = Arc::new(layout.validated().unwrap());
        let item_bytes = layout.item_bytes(Component::Latent, Part::Target, None).unwrap();
        let manifest = |address: u64| {
            let entry = BufferEntry {
                component: Component::Latent,
                part: Part::Target,
                layer_id: 0,
                device: "npu:0".into(),
                address,
                nbytes: item_bytes * number("items"),
                item_stride: item_bytes,
                item_bytes,
                head_range: (0, 1),
                occurrence: 0,
            };
            Side::Rank(Arc::new(RankManifest::new(layout.clone(), Placement::default(), vec![entry]).unwrap()))
        };
        let (base, page) = (number("base"), number("page"));
        let agreement = agree(manifest(base), manifest(base + (1 << 50))).unwrap();
        let runs = Runs::new(&[page as i64], &[page as i64]).unwrap();
        let lowered =
            lower(&Plan::new(agreement.route(0, 0).unwrap(), runs).unwrap(), &Capabilities::default()).unwrap();
        assert_eq!(lowered.batches[0].source, [base + number("offset")], "{case}");
        assert_eq!(lowered.batches[0].destination, [base + (1 << 50) + number("offset")], "{case}");
    }
}

/// Every buffer of one of four ranks; two heads a rank, so that the order of axes matters.
fn rank(layout: &Arc<ModelLayout>) -> Side {
    let mut address = 4096;
    let mut entries = Vec::new();
    for spec in &layout.components {
        let item_bytes = layout.item_bytes(spec.component, spec.part, Some(2)).unwrap();
        for (layer_id, count) in spec.counted_ids() {
            for occurrence in 0..count {
                entries.push(BufferEntry {
                    component: spec.component,
                    part: spec.part,
                    layer_id,
                    device: "cpu".into(),
                    address,
                    nbytes: item_bytes * 4,
                    item_stride: item_bytes,
                    item_bytes,
                    head_range: (0, 2),
                    occurrence,
                });
                address += item_bytes * 4;
            }
        }
    }
    Side::Rank(Arc::new(
        RankManifest::new(layout.clone(), Placement { tp_size: 4, ..Placement::default() }, entries).unwrap(),
    ))
}

#[test]
fn refusals() {
    let file = read("refusals.json");
    let local = layout(&file["base"]);
    for case in list(&file, "cases") {
        let mut changed = file["base"].clone();
        for change in list(case, "changes") {
            let pointer = format!("/{}", change[0].as_str().unwrap().replace('.', "/"));
            *changed.pointer_mut(&pointer).unwrap() = change[1].clone();
        }
        let result = agree(rank(&local), rank(&layout(&changed)));
        let spell = |value: &kv_planner::Value| match value {
            kv_planner::Value::Int(number) => Value::from(*number as i64),
            kv_planner::Value::Text(text) => Value::from(text.as_str()),
            kv_planner::Value::Absent => Value::Null,
        };
        let found: Vec<Value> = match &result {
            Ok(_) => Vec::new(),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::LayoutMismatch);
                let row = |d: &Difference| {
                    Value::from(vec![Value::from(d.field.as_str()), spell(&d.local), spell(&d.remote)])
                };
                error.detail.differences.iter().map(row).collect()
            }
        };
        assert_eq!(&found, list(case, "fields"), "{case}");
    }
}
